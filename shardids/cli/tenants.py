"""``shardids tenant``: keys whose rows live in another shard than that of their hash."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from shardids.cli.command import Run, takes
from shardids.cli.pins import KeyArgument, KindOption, pin_tenant, unpin_tenant
from shardids.cli.printing import err, out, print_json, print_rows, print_warnings, printable
from shardids.cli.tables.tenant_moves import move_tenant
from shardids.errors import BadArgument
from shardids.pg.notation import counted

if TYPE_CHECKING:
    from shardids.catalog.keys.homes import Home
    from shardids.catalog.rows import Catalog

app = typer.Typer(
    help="Keys with their rows: show where they live and how large they are, and move one to another shard.",
    no_args_is_help=True,
)

ColumnsOption = Annotated[
    list[str] | None,
    typer.Option("--key", metavar="TABLE.COLUMN", help="A column of sharding keys; repeatable."),
]
ModelsOption = Annotated[
    str | None,
    typer.Option(metavar="PACKAGE.MODULE:BASE", help="The same for all sharding keys of these models."),
]


@app.command("list")
@takes("catalog", "json")
def list_tenants(
    run: Run,
    kind: Annotated[str | None, typer.Option(help="Only keys of this kind: text, bigint@eu …")] = None,
    shard: Annotated[int | None, typer.Option(min=0, help="Only keys that live in this shard.")] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="COUNT", help="At most so many.")] = 1000,
) -> None:
    """List the directory of keys: those that live in another shard than that of their hash."""
    from shardids.catalog.keys.homes import homes

    there = run.catalog
    found = homes(there, kind=kind, shard=shard, limit=limit + 1)
    placement = there.placement()
    rows = [
        {
            "key": home.key,
            "kind": home.kind,
            "shard": home.shard,
            "node": placement.owners().get(home.shard),
            "since": home.since,
        }
        for home in found[:limit]
    ]
    if run.as_json:
        print_json(rows)
    else:
        shown = [row | {"key": printable(str(row["key"]))} for row in rows]
        is_whole = kind is None and shard is None
        empty = "Every key lives in the shard of its hash." if is_whole else "No such key in the directory."
        print_rows(shown, empty=empty)
    if len(found) > limit:
        err.print(f"There are more than {limit:,}: --limit COUNT shows more.")


@app.command()
@takes("catalog", "json")
def show(
    run: Run,
    key: KeyArgument,
    kind: KindOption = "text",
    columns: ColumnsOption = None,
    models: ModelsOption = None,
) -> None:
    """Show where a key lives and, with --key or --models, how many rows it has there, by table."""
    from rich.filesize import decimal

    from shardids.catalog.keys.homes import read_home, shard_of_key
    from shardids.catalog.keys.known import key_text, parse_key
    from shardids.catalog.keys.moved_ids import moved_keys
    from shardids.tenants.rows import rows_of_key

    there = run.catalog
    value = parse_key(key, kind)
    with there.engine.connect() as connection:
        home = read_home(connection, kind, key)
        shard = shard_of_key(connection, kind, key)
        born = [one.origin for one in moved_keys(connection, kind, key) if one.shard != one.origin]
    placement = there.placement()
    named = key_columns(columns, models)
    rows = rows_of_key(there, shard, value, named) if named else []
    if run.as_json:
        print_json(
            {
                "key": key_text(value),
                "kind": kind,
                "shard": shard,
                "node": placement.owners().get(shard),
                "since": None if home is None else home.since.isoformat(timespec="seconds"),
                "born_in": born,
                "tables": [asdict(one) for one in rows],
            }
        )
        return
    out.print(
        f'{printable(key_text(value))}: {_lives(home, shard)}, on node "{placement.owners().get(shard)}"'
    )
    if born:
        out.print(f"IDs of its rows were also born in {', '.join(f'shard {one}' for one in born)}")
    if named:
        total = sum(one.size_bytes for one in rows)
        print_rows([asdict(one) for one in rows], empty="No table has a path to such a key.")
        out.print(f"{counted(sum(one.rows for one in rows), 'row')}, {decimal(total)} without indexes")


@app.command()
@takes("catalog", "json")
def top(
    run: Run,
    shard: Annotated[int, typer.Argument(min=0, help="The shard; shardids id stats shows the busy ones.")],
    columns: ColumnsOption = None,
    models: ModelsOption = None,
    last: Annotated[int, typer.Option(min=1, metavar="MINUTES", help="Look at rows that are no older.")] = 60,
    limit: Annotated[int, typer.Option(min=1, metavar="COUNT", help="At most so many.")] = 10,
) -> None:
    """Show which keys make a shard busy: those with most new rows, by the time in their IDs."""
    from shardids.tenants.rows import busy_keys

    named = key_columns(columns, models)
    if not named:
        raise BadArgument(
            "which columns hold the keys?",
            hint="Name them with --key users.name, or --models app.models:Base",
        )
    found = busy_keys(run.catalog, shard, named, last_ms=last * 60_000, limit=limit)
    if run.as_json:
        print_json([asdict(one) for one in found])
        return
    rows = [
        {
            "key": printable(one.key),
            "kind": one.kind,
            "new rows": one.rows,
            "share": f"{one.share:.0%}",
            "most in": one.table,
        }
        for one in found
    ]
    print_rows(rows, empty=f"Shard {shard} has no row of a key that is younger than {last} minutes.")


@app.command()
@takes("catalog", "dry-run", "json")
def sync(run: Run) -> None:
    """Bring the nodes' copies of the directory, which SQL asks, up to date. Idempotent."""
    found = bring(run.catalog, verify=True, dry_run=run.dry)
    if run.as_json:
        print_json(found)
        return
    said = "would change" if run.dry else "changed"
    print_rows([{"node": name, f"entries that {said}": count} for name, count in found.items()])


def bring(catalog: Catalog, *, verify: bool = False, dry_run: bool = False) -> dict[str, int]:
    """Bring the nodes' copies up to date; warn of nodes that do not answer; return the changes by node."""
    from shardids.catalog.keys.copies import bring_homes

    answers = bring_homes(catalog, verify=verify, dry_run=dry_run)
    print_warnings(
        f'node "{name}" has an old copy of the directory of keys: {error.message}.'
        " Later: shardids tenant sync"
        for name, error in sorted(answers.failures.items())
    )
    return dict(sorted(answers.results.items()))


def key_columns(columns: list[str] | None, models: str | None) -> list[str]:
    """Return the key columns that options name, and those of models.

    Raises:
        BadArgument: one is malformed, or the models can't be loaded.
    """
    from shardids.migrate.scaffold import load_metadata
    from shardids.watch.facts.rows import ShardingKey, keys_of

    named = [ShardingKey.parse(one) for one in columns or ()]
    if models is not None:
        named += [one for one in keys_of(load_metadata(models)[0]) if one not in named]
    return [f"{one.table_name}.{one.column_name}" for one in named]


def _lives(home: Home | None, shard: int) -> str:
    if home is None:
        return f"lives in shard {shard}, by its hash"
    return f"lives in shard {shard} since {home.since:%Y-%m-%d %H:%M}, by the directory"


app.command("move")(move_tenant)
app.command("pin")(pin_tenant)
app.command("unpin")(unpin_tenant)
