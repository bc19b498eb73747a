from django.db import migrations

ROWS = """
insert into library_author (name) values ('100% ann'), ('bob; -- cleo');
insert into library_book (title, isbn, author_id) select 'of ' || name, name, id from library_author;
"""


class Migration(migrations.Migration):
    dependencies = [("library", "0001_initial")]
    operations = [migrations.RunSQL(ROWS, reverse_sql=migrations.RunSQL.noop)]
