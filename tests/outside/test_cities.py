"""A real application's models, django-cities-light's, in shards: migrations, queries, keys, admin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sqlalchemy.engine import URL

from tests.conftest import dsn
from tests.support.clusters import environment

SETTINGS = """
import os

SECRET_KEY = "of the tests"
USE_TZ = True
INSTALLED_APPS = ["django.contrib.contenttypes", "shardids.django", "cities_light", "world"]
DATABASES = {}
DATABASE_ROUTERS = ["shardids.django.ShardRouter"]
DEFAULT_AUTO_FIELD = "shardids.django.ShardIdField"
SHARDIDS = {"CATALOG": os.environ["SHARDIDS_CATALOG"]}
CITIES_LIGHT_APP_NAME = "world"
MIGRATION_MODULES = {"cities_light": None}
"""
MODELS = """
from cities_light.abstract_models import AbstractCity, AbstractCountry, AbstractRegion, AbstractSubRegion
from cities_light.receivers import connect_default_signals


class Country(AbstractCountry):
    pass


class Region(AbstractRegion):
    pass


class SubRegion(AbstractSubRegion):
    pass


class City(AbstractCity):
    pass


for model in (Country, Region, SubRegion, City):
    connect_default_signals(model)
"""
USE = """
import django

django.setup()

from django.db.models import Count
from world.models import City, Country, Region

from shardids.django import get_cluster, in_shard

for shard in (2, 6):
    with in_shard(shard=shard):
        spain = Country.objects.create(name="Espa\\u00f1a", code2="ES", continent="EU")
        region = Region.objects.create(name="Galicia", country=spain)
        City.objects.bulk_create(
            City(name=name, country=spain, region=region, search_names=name.lower())
            for name in ("Vigo", "Lugo")
        )
        city = City.objects.create(name="A Coru\\u00f1a", country=spain, region=region, population=250_000)
        assert city.slug == "a-coruna" and city.display_name.startswith("A Coru")
        assert get_cluster().decode(city.pk).shard == shard
        assert City.objects.filter(country__code2="ES", search_names__icontains="vigo").get().name == "Vigo"
        assert Country.objects.annotate(n=Count("city")).get().n == 3
        assert City.objects.select_related("region__country").get(pk=city.pk).region.country == spain
        assert Country.objects.get_by_natural_key(None) == spain
        assert spain.delete()[0] == 5
print("used")
"""


def test_the_models_of_django_cities_light(cluster_url: URL, cities_light: Path, tmp_path: Path) -> None:
    (tmp_path / "world" / "migrations").mkdir(parents=True)
    (tmp_path / "world" / "migrations" / "__init__.py").touch()
    (tmp_path / "world" / "models.py").write_text(MODELS, encoding="utf-8")
    (tmp_path / "settings.py").write_text(SETTINGS, encoding="utf-8")
    found = environment(SHARDIDS_CATALOG=dsn(cluster_url), DJANGO_SETTINGS_MODULE="settings")
    found["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(cities_light), found["PYTHONPATH"]])

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=found, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("-m", "django", "makemigrations", "world")
    assert "8 done" in run("-m", "django", "migrate_shards")
    assert run("-c", USE).endswith("used\n")
