from django.contrib.postgres.operations import AddIndexConcurrently, RemoveIndexConcurrently
from django.db import migrations, models
from django.db.models import Q


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("library", "0003_changes")]
    operations = [
        migrations.RenameIndex("Book", new_name="book_slug_there", old_name="book_slug"),
        migrations.AlterModelTable("Copy", "library_copies"),
        AddIndexConcurrently("Copy", models.Index(fields=["book"], name="copy_tmp")),
        migrations.AddField("Copy", "owner_id", models.BigIntegerField(null=True)),
        RemoveIndexConcurrently("Copy", "copy_tmp"),
        AddIndexConcurrently(
            "Book", models.Index(fields=["price"], name="book_price", condition=Q(price__gt=0))
        ),
        RemoveIndexConcurrently("Book", "book_price"),
    ]
