from django.db import migrations, models


def fill(apps, schema_editor):
    """As such code is written: partly with the alias, partly without."""
    alias = schema_editor.connection.alias
    thing = apps.get_model("crm", "Thing").objects.using(alias).create(name="first of all")
    thing.tags.add(apps.get_model("crm", "Tag").objects.create(name="old"))
    apps.get_model("crm", "Thing").objects.filter(name__startswith="first").update(slug="first")
    with schema_editor.connection.cursor() as cursor:
        cursor.execute("insert into crm_tag (name) values ('by hand')")
    schema_editor.execute("comment on table crm_tag is 'code was here'")


class Migration(migrations.Migration):
    dependencies = [("crm", "0001_initial")]
    operations = [
        migrations.AddField("Thing", "slug", models.CharField(default="", max_length=40)),
        migrations.RunPython(fill, migrations.RunPython.noop, hints={"shards": True}),
        migrations.RunSQL("update crm_tag set name = upper(name)", hints={"shards": True}),
        migrations.RunSQL("insert into crm_setting (name) values ('one')", hints={"shards": False}),
    ]
