from django.db import migrations, models

import shardids.django.fields


class Migration(migrations.Migration):
    initial = True
    dependencies = []
    operations = [
        migrations.CreateModel(
            name="Author",
            fields=[
                ("id", shardids.django.fields.ShardIdField(primary_key=True, serialize=False)),
                ("name", models.CharField(max_length=100, unique=True)),
            ],
        ),
        migrations.CreateModel(
            name="Book",
            fields=[
                ("id", shardids.django.fields.ShardIdField(primary_key=True, serialize=False)),
                ("title", models.CharField(max_length=200)),
                ("isbn", models.CharField(max_length=20, unique=True)),
                ("pages", models.IntegerField(db_default=1)),
                ("author", models.ForeignKey(on_delete=models.deletion.CASCADE, to="library.author")),
            ],
            options={"unique_together": {("author", "title")}},
        ),
    ]
