from django.conf import settings
from django.db import migrations, models

from shardids.django import ShardIdField

THROUGH = [
    migrations.CreateModel(
        "Tagged",
        [
            ("id", models.BigAutoField(primary_key=True, serialize=False)),
            ("item", models.ForeignKey(on_delete=models.CASCADE, to="crm.item")),
            ("tag", models.ForeignKey(on_delete=models.CASCADE, to="crm.tag")),
        ],
        options={"db_table": "crm_item_tags"},
    ),
    migrations.AlterField("Item", "tags", models.ManyToManyField(through="crm.Tagged", to="crm.tag")),
]


class Migration(migrations.Migration):
    dependencies = [("crm", "0002_code")]
    operations = [
        migrations.RenameModel("Thing", "Item"),
        migrations.SeparateDatabaseAndState([], THROUGH),
        migrations.AlterField("Tag", "id", ShardIdField(primary_key=True, serialize=False)),
        migrations.AlterField("Item", "id", ShardIdField(primary_key=True, serialize=False)),
        migrations.AlterField("Tagged", "id", ShardIdField(primary_key=True, serialize=False)),
        migrations.AlterField(
            "Item",
            "owner",
            models.ForeignKey(
                db_constraint=False,
                null=True,
                on_delete=models.DO_NOTHING,
                to=settings.AUTH_USER_MODEL,
            ),
        ),
        migrations.AlterField(
            "Setting",
            "item",
            models.ForeignKey(db_constraint=False, null=True, on_delete=models.DO_NOTHING, to="crm.item"),
        ),
        migrations.DeleteModel("Draft"),
        migrations.CreateModel(
            "Note",
            [
                ("id", ShardIdField(primary_key=True, serialize=False)),
                ("item", models.ForeignKey(on_delete=models.CASCADE, to="crm.item")),
            ],
        ),
    ]
