"""``python -m benchmarks.django_tenants FOLDER``: beside django-tenants.

FOLDER is where django-tenants is: ``pip install --no-deps --target FOLDER django-tenants``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import LiteralString

import psycopg

from benchmarks.report import Section, interleaved, ratio, seconds, show
from shardids.catalog.rows import Catalog
from shardids.ids.layout import DEFAULT
from shardids.migrate.install import provision
from shardids.pg.embedded import EmbeddedServer, temporary_server
from shardids.pg.urls import parse_url

SCHEMAS = 200

SETTINGS = """\
SECRET_KEY = "of the benchmark"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""
OURS = (
    SETTINGS
    + """
INSTALLED_APPS = ["shardids.django", "shop"]
DATABASE_ROUTERS = ["shardids.django.ShardRouter"]
SHARDIDS = {{"CATALOG": {url!r}}}
"""
)
THEIRS = (
    SETTINGS
    + """
SHARED_APPS = ["django.contrib.contenttypes", "django_tenants", "tenants"]
TENANT_APPS = ["shop"]
INSTALLED_APPS = SHARED_APPS + TENANT_APPS
TENANT_MODEL, TENANT_DOMAIN_MODEL = "tenants.Tenant", "tenants.Domain"
DATABASE_ROUTERS = ["django_tenants.routers.TenantSyncRouter"]
DATABASES = {{"default": {{"ENGINE": "django_tenants.postgresql_backend", **{database!r}}}}}
"""
)
TENANTS = """\
from django.db import models
from django_tenants.models import DomainMixin, TenantMixin


class Tenant(TenantMixin):
    auto_create_schema = False


class Domain(DomainMixin):
    pass
"""
SHOP = """\
from django.db import models
from {module} import {field}


class Item(models.Model):
    id = {field}(primary_key=True)
    name = models.CharField(max_length=200)


class Order(models.Model):
    id = {field}(primary_key=True)
    item = models.ForeignKey(Item, models.CASCADE)
    amount = models.IntegerField(default=1)
"""
COLUMN = """\
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("shop", "0001_initial")]
    operations = [migrations.AddField("Order", "note", models.TextField(null=True))]
"""


class Project:
    """A Django project in a folder, whose commands are processes of their own."""

    def __init__(
        self, folder: Path, settings: str, *, key: tuple[str, str], path: Path | None = None
    ) -> None:
        self._folder = folder
        (folder / "shop" / "migrations").mkdir(parents=True)
        (folder / "shop" / "migrations" / "__init__.py").touch()
        (folder / "settings.py").write_text(settings, encoding="utf-8")
        module, field = key
        (folder / "shop" / "models.py").write_text(SHOP.format(module=module, field=field), encoding="utf-8")
        entries = [str(folder), *([str(path)] if path else []), *(entry for entry in sys.path if entry)]
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(entries),
            "DJANGO_SETTINGS_MODULE": "settings",
        }

    def manage(self, *words: str) -> None:
        """Run ``manage.py``. Raises RuntimeError with what it printed if it fails."""
        command = [sys.executable, "-m", "django", *words]
        done = subprocess.run(
            command, cwd=self._folder, env=self._environment, check=False, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"manage.py {' '.join(words)}:\n{done.stdout}{done.stderr}")

    def first_migration(self) -> None:
        """Write the first migration of the shop, and of the tenants if they are there."""
        self.manage("makemigrations", "shop")

    def add_column(self) -> None:
        """Write the second migration of the shop."""
        (self._folder / "shop" / "migrations" / "0002_note.py").write_text(COLUMN, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Side:
    """A project, its database, its schemas, and where each records its migrations."""

    server: EmbeddedServer
    database: str
    project: Project
    schemas: Sequence[str]
    record: str

    def migrated(self, words: Sequence[str]) -> float:
        """Take the column away, migrate, and return the time of that in seconds.

        Raises:
            RuntimeError: the column is not in every schema.
        """
        with _connected(self.server, self.database) as connection:
            for schema in self.schemas:
                drop = f"alter table {schema}.shop_order drop column if exists note"
                connection.execute(f"begin; {drop}; delete from {schema}.{self.record}; commit".encode())
            taken = self.migrated_again(words)
            found = connection.execute(_WITH_COLUMN).fetchone()
        if found != (len(self.schemas),):
            raise RuntimeError(f"{words}: the column is in {found} schemas, not in {len(self.schemas)}")
        return taken

    def migrated_again(self, words: Sequence[str]) -> float:
        """Migrate, and return the time of that in seconds."""
        return seconds(lambda: self.project.manage(*words))


_WITH_COLUMN: LiteralString = """
    select count(*) from information_schema.columns
     where table_name = 'shop_order' and column_name = 'note'"""


def run(path: Path, rounds: int, schemas: int) -> Section:
    """Measure both on one server, round after round."""
    with temporary_server() as server, tempfile.TemporaryDirectory() as name:
        shards = [f"shard_{number:04}" for number in range(schemas)]
        tenants = [f"tenant_{number:04}" for number in range(schemas)]
        ours = Side(
            server,
            "ours",
            _ours(server, Path(name, "ours"), schemas),
            shards,
            "alembic_version where version_num = 'shop.0002_note'",
        )
        theirs = Side(
            server,
            "theirs",
            _theirs(server, Path(name, "theirs"), path, schemas),
            tenants,
            "django_migrations where name = '0002_note'",
        )
        for side in (ours, theirs):
            side.project.add_column()
        tenants_only = ("migrate_schemas", "--tenant")
        ways: dict[str, tuple[Side, Sequence[str]]] = {
            "migrate_shards": (ours, ["migrate_shards"]),
            "migrate_schemas": (theirs, tenants_only),
            "migrate_schemas, 2 processes": (theirs, [*tenants_only, "--executor", "multiprocessing"]),
        }
        measures = interleaved(
            {f"one column: {name}": partial(side.migrated, words) for name, (side, words) in ways.items()},
            rounds=rounds,
            unit="s",
        )
        measures |= interleaved(
            {
                f"nothing to do: {name}": partial(side.migrated_again, words)
                for name, (side, words) in ways.items()
            },
            rounds=rounds,
            unit="s",
        )
    return Section(
        title=f"Django: one migration in {schemas} schemas, beside django-tenants",
        conditions=f"One server, fsync off, {schemas} shards and as many tenants' schemas, two tables each;"
        f" {rounds} rounds. Each figure is a process of manage.py, whose start is counted: nothing to do, and"
        " one nullable column. Neither has another application per schema.",
        measures=tuple(measures.values()),
        ratios=tuple(
            ratio(measures[f"{what}: {other}"], measures[f"{what}: migrate_shards"])
            for what in ("one column", "nothing to do")
            for other in ("migrate_schemas", "migrate_schemas, 2 processes")
        ),
    )


def _ours(server: EmbeddedServer, folder: Path, schemas: int) -> Project:
    url = _database(server, "ours")
    catalog = Catalog(url)
    try:
        provision.init(catalog, DEFAULT, schemas)
        provision.add_node(catalog, "a", url)
        provision.create_shards(catalog, range(schemas))
    finally:
        catalog.close()
    key = ("shardids.django", "ShardIdField")
    project = Project(folder, OURS.format(url=url), key=key)
    project.first_migration()
    project.manage("migrate_shards")
    return project


def _theirs(server: EmbeddedServer, folder: Path, path: Path, schemas: int) -> Project:
    _database(server, "theirs")
    parameters = psycopg.conninfo.conninfo_to_dict(server.url())
    database = {
        "NAME": "theirs",
        "USER": parameters.get("user", ""),
        "HOST": parameters.get("host", ""),
        "PORT": parameters.get("port", ""),
        "OPTIONS": {"passfile": parameters["passfile"]} if "passfile" in parameters else {},
        "PASSWORD": parameters.get("password", ""),
    }
    key = ("django.db.models", "BigAutoField")
    project = Project(folder, THEIRS.format(database=database), key=key, path=path)
    (folder / "tenants" / "migrations").mkdir(parents=True)
    (folder / "tenants" / "migrations" / "__init__.py").touch()
    (folder / "tenants" / "models.py").write_text(TENANTS, encoding="utf-8")
    project.manage("makemigrations", "tenants")
    project.first_migration()
    project.manage("migrate_schemas", "--shared")
    with _connected(server, "theirs") as connection:
        for number in range(schemas):
            name = f"tenant_{number:04}"
            connection.execute("insert into tenants_tenant (schema_name) values (%s)", [name])
            connection.execute(f"create schema {name}".encode())
    project.manage("migrate_schemas", "--tenant", "--executor", "multiprocessing")
    return project


def _database(server: EmbeddedServer, name: str) -> str:
    with _connected(server, "postgres") as connection:
        connection.execute(f"create database {name}".encode())
    return _url(server, name)


def _url(server: EmbeddedServer, database: str) -> str:
    url = parse_url(server.url()).set(drivername="postgresql", database=database)
    return url.render_as_string(hide_password=False)


@contextmanager
def _connected(server: EmbeddedServer, database: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(_url(server, database), autocommit=True) as connection:
        yield connection


def main() -> None:
    """Run it and print what it found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.django_tenants", description="Beside it.")
    parser.add_argument("folder", type=Path, help="where django-tenants is installed")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each, after one to warm up")
    parser.add_argument("--schemas", type=int, default=SCHEMAS, help="how many on either side")
    arguments = parser.parse_args()
    show(run(arguments.folder.absolute(), arguments.rounds, arguments.schemas))


if __name__ == "__main__":
    main()
