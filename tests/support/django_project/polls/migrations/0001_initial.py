from django.db import migrations, models

import shardids.django.fields


class Migration(migrations.Migration):
    initial = True
    dependencies = []
    operations = [
        migrations.CreateModel(
            name="Question",
            fields=[
                ("id", shardids.django.fields.ShardIdField(primary_key=True, serialize=False)),
                ("question_text", models.CharField(max_length=200)),
                ("pub_date", models.DateTimeField(verbose_name="date published")),
            ],
        ),
        migrations.CreateModel(
            name="Choice",
            fields=[
                ("id", shardids.django.fields.ShardIdField(primary_key=True, serialize=False)),
                ("choice_text", models.CharField(max_length=200)),
                ("votes", models.IntegerField(default=0)),
                ("question", models.ForeignKey(on_delete=models.deletion.CASCADE, to="polls.question")),
            ],
        ),
    ]
