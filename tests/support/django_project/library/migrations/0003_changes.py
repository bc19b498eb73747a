from django.db import migrations, models
from django.db.models import Q

import shardids.django.fields


class Migration(migrations.Migration):
    dependencies = [("library", "0002_rows"), ("auth", "0001_initial")]
    operations = [
        migrations.RenameModel("Author", "Writer"),
        migrations.RenameField("Book", "title", "heading"),
        migrations.RenameField("Book", "author", "writer"),
        migrations.AlterUniqueTogether("book", set()),
        migrations.RemoveField("Book", "isbn"),
        migrations.AlterField("Writer", "name", models.CharField(max_length=200, db_index=True)),
        migrations.AlterField(
            "Book",
            "writer",
            models.ForeignKey(null=True, on_delete=models.deletion.SET_NULL, to="library.writer"),
        ),
        migrations.AlterField(
            "Book",
            "heading",
            models.CharField(max_length=300, db_index=True, db_comment="what readers see"),
        ),
        migrations.AlterField("Book", "pages", models.BigIntegerField(db_default=1)),
        migrations.AddField("Book", "slug", models.SlugField(default="it's new")),
        migrations.AddField("Writer", "born", models.DateField(null=True)),
        migrations.AddField("Book", "price", models.DecimalField(max_digits=10, decimal_places=2, default=0)),
        migrations.AddConstraint(
            "Book", models.UniqueConstraint(fields=["writer", "heading"], name="one_of_each")
        ),
        migrations.AddConstraint(
            "Book", models.CheckConstraint(condition=Q(price__gte=0), name="price_is_paid")
        ),
        migrations.AddIndex("Book", models.Index(fields=["slug"], name="book_slug", condition=~Q(slug=""))),
        migrations.CreateModel(
            name="Copy",
            fields=[
                ("id", shardids.django.fields.ShardIdField(primary_key=True, serialize=False)),
                ("book", models.ForeignKey(on_delete=models.deletion.CASCADE, to="library.book")),
            ],
        ),
        migrations.RunPython(migrations.RunPython.noop, migrations.RunPython.noop),
    ]
