from django.conf import settings
from django.db import migrations, models

KEY = models.BigAutoField(primary_key=True, serialize=False)


class Migration(migrations.Migration):
    initial = True
    dependencies = [migrations.swappable_dependency(settings.AUTH_USER_MODEL)]
    operations = [
        migrations.CreateModel("Tag", [("id", KEY), ("name", models.CharField(max_length=40))]),
        migrations.CreateModel(
            "Thing",
            [
                ("id", KEY),
                ("name", models.CharField(max_length=40)),
                (
                    "owner",
                    models.ForeignKey(null=True, on_delete=models.CASCADE, to=settings.AUTH_USER_MODEL),
                ),
                ("tags", models.ManyToManyField(to="crm.tag")),
            ],
        ),
        migrations.CreateModel("Draft", [("id", KEY), ("name", models.CharField(max_length=40))]),
        migrations.CreateModel(
            "Setting",
            [
                ("id", KEY),
                ("name", models.CharField(max_length=40)),
                ("item", models.ForeignKey(null=True, on_delete=models.CASCADE, to="crm.thing")),
            ],
        ),
    ]
