"""Checks of the generator: the layout, the engine, clocks and ticks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations

from shardids.catalog.shards import Shard
from shardids.ids.layout import Layout
from shardids.migrate.install import trees
from shardids.pg.clock import Difference
from shardids.pg.notation import named_shards, shown_shards
from shardids.pg.queries import quoted
from shardids.watch.doctor.findings import Found, Severity, check, grouped, in_shell, on_node
from shardids.watch.facts.cluster import ChangedFunction, ClusterFacts

_MOST_AHEAD_MS = 60_000
"""Ticks may run ahead this far, and by six of the node's safety margins, after bulk loads and restarts."""
_NEAR_THE_LIMIT = 0.8
_STEP_MS = 16
"""A shard that follows the clock is ahead of it by less: the increment of its ``id_offset``."""
_FEW_YEARS = 10
_DAYS_A_YEAR = 365.2425
_DAY_MS = 86_400_000


@check(
    "layout-differs",
    Severity.ERROR,
    remedy="Take the node out of use at once; its engine must be installed again.",
)
def layout_differs(facts: ClusterFacts) -> Iterator[Found]:
    """A node's layout or schema prefix is not the cluster's: its IDs mean something else."""
    layout = facts.description.layout
    wanted = [
        ("epoch_ms", layout.epoch_ms),
        ("time_bits", layout.time_bits),
        ("shard_bits", layout.shard_bits),
        ("sequence_bits", layout.sequence_bits),
        ("schema_prefix", facts.description.schema_prefix),
    ]
    for name, node in facts.nodes.items():
        for field, expected in wanted:
            if node.engine and (there := getattr(node.engine, field)) != expected:
                yield Found(
                    what=f'shardids.{field}() of node "{name}" is {there}; the cluster\'s is {expected}',
                    to_do="Fence its shards until it is clear which IDs it issued: select shardids.fence(id)"
                    " from shardids.shard",
                    nodes=(name,),
                    thing=f"shardids.{field}()",
                )


@check("engine-revision", Severity.WARNING, remedy="Upgrade older objects: `shardids upgrade`.")
def engine_revision(facts: ClusterFacts) -> Iterator[Found]:
    """The catalog, a node or a shard is at another revision than this shardids would install."""
    if facts.catalog_revisions != (trees.head("catalog"),):
        yield _other_revision("the catalog", facts.catalog_revisions, "catalog")
    for name, node in facts.nodes.items():
        if node.engine and node.engine.revisions != [trees.head("node")]:
            yield _other_revision(f'node "{name}"', tuple(node.engine.revisions), "node", nodes=(name,))
        apart = (
            (there, shard)
            for shard, local in node.shards.items()
            if local.state == "active"
            and local.has_schema
            and (there := node.revisions.get(shard, ())) != (trees.head("shard"),)
            # With an error, perhaps none was read.
            and (node.revisions or not node.error)
            and ("shardids_version", shard) not in node.unread
        )
        for there, shards in grouped(apart).items():
            where = f'{named_shards(shards)} of node "{name}"'
            yield _other_revision(where, there, "shard", nodes=(name,), shards=shards)


def _other_revision(
    where: str,
    revisions: tuple[str, ...],
    tree: trees.Tree,
    *,
    nodes: tuple[str, ...] = (),
    shards: tuple[int, ...] = (),
) -> Found:
    there = ", ".join(revisions) or "no revision"
    return Found(
        what=f"{where}: at {there}; this shardids installs {trees.head(tree)}",
        to_do="Upgrade with the newest shardids that uses the cluster",
        commands=in_shell("shardids upgrade"),
        nodes=nodes,
        shards=shards,
    )


@check("engine-changed", Severity.ERROR, remedy="Restore it from `shardids sql`.")
def engine_changed(facts: ClusterFacts) -> Iterator[Found]:
    """A function of schema shardids is missing, or not what shardids installs: changed by hand."""
    for name, node in facts.nodes.items():
        for what, functions in (
            ("missing", [f.function for f in node.changed_functions if not f.is_installed]),
            ("not what shardids installs", [f.function for f in node.changed_functions if _is_changed(f)]),
            ("not of shardids", [f.function for f in node.changed_functions if not f.is_wanted]),
        ):
            if functions:
                yield Found(
                    what=f'{what} in schema shardids of node "{name}": {", ".join(functions)}',
                    to_do="Create them again from the files that shardids sql names"
                    if what != "not of shardids"
                    else "Drop them",
                    commands=on_node(name, *(f"drop function {function};" for function in functions))
                    if what == "not of shardids"
                    else (),
                    nodes=(name,),
                    thing=functions[0] if len(functions) == 1 else "",
                )


def _is_changed(function: ChangedFunction) -> bool:
    return function.is_installed and function.is_wanted


@check("generator-changed", Severity.ERROR, remedy="Restore it from `shardids sql engine/generator.v1`.")
def generator_changed(facts: ClusterFacts) -> Iterator[Found]:
    """A shard's own next_id() or next_ids() is missing, or not what shardids installs."""
    for name, node in facts.nodes.items():
        shards = [local for local in node.shards.values() if local.state == "active" and local.has_sequences]
        bodies = Counter(local.next_ids_body for local in shards if local.next_ids_body)
        usual = bodies.most_common(1)[0][0] if bodies else None
        for function, changed in (
            ("next_id()", [s.shard for s in shards if not s.next_id_is_ours]),
            ("next_ids(integer)", [s.shard for s in shards if s.next_ids_body != usual or usual is None]),
        ):
            if changed:
                yield Found(
                    what=f'{function} of {named_shards(changed)} on node "{name}" is not as installed',
                    to_do="Fence the shard, and create the function again as engine/generator.v1 does;"
                    " shardids sql engine/generator.v1 prints it",
                    nodes=(name,),
                    shards=tuple(changed),
                    thing=function,
                )


@check("generator-sequence", Severity.ERROR, remedy="Alter it back: a cached value issues IDs out of order.")
def generator_sequence(facts: ClusterFacts) -> Iterator[Found]:
    """A sequence of a shard's generator is not as shardids creates it: CACHE, INCREMENT, CYCLE, owner."""
    for name, node in facts.nodes.items():
        alike = grouped(
            ((sequence.name, tuple(sequence.differences), sequence.owner), sequence.shard)
            for sequence in node.sequences
        )
        for (sequence, differences, owner), shards in alike.items():
            qualified = [f"{quoted(node.shards[s].schema)}.{sequence}" for s in shards if s in node.shards]
            changes = [_reset(sequence, difference, owner) for difference in differences]
            yield Found(
                what=f'{sequence} of {named_shards(shards)} on node "{name}" has {", ".join(differences)}',
                to_do="Alter it back",
                commands=on_node(
                    name, *(f"alter sequence {one} {change};" for one in qualified for change in changes)
                ),
                nodes=(name,),
                shards=shards,
                thing=sequence,
            )


def _reset(sequence: str, difference: str, owner: str) -> str:
    """Return the options of ALTER SEQUENCE that end a difference of ``doctor/sequences.v1.sql``."""
    match difference.split(maxsplit=1)[0]:
        case "cache":
            return "cache 1"
        case "increment":
            return f"increment by {_STEP_MS if sequence == 'id_offset' else 1}"
        case "cycle":
            return "no cycle"
        case "unlogged":
            return "set logged"
        case "owner":
            return f"owner to {quoted(owner)}"
        case _:
            return "as bigint no maxvalue"


@check("generator-behind", Severity.ERROR, remedy="Activate the shard past its newest ID.")
def generator_behind(facts: ClusterFacts) -> Iterator[Found]:
    """A shard has an ID beyond those that its generator issued: a sequence was set back."""
    layout = facts.description.layout
    for name, node in facts.nodes.items():
        for shard, (_, draws) in sorted(node.draws.items()):
            stored_tick = draws.stored_tick(layout)
            if draws.has_drawn and stored_tick < draws.high_water_tick and facts.is_settled(shard, name):
                yield Found(
                    what=f'shard {shard} of node "{name}" is at tick {stored_tick}, below its high-water'
                    f" tick, {draws.high_water_tick}: a sequence was set back, and IDs may repeat",
                    to_do="Activate it above that tick",
                    commands=in_shell(
                        f"shardids shard activate {shard} --above-tick {draws.high_water_tick}"
                    ),
                    nodes=(name,),
                    shards=(shard,),
                )
        for sample in node.samples:
            # Read after the rows, so that it is past all of them.
            _, last = node.draws.get(sample.shard, (None, None))
            if sample.newest is None or last is None or not facts.is_settled(sample.shard, name):
                continue
            newest = layout.decode(sample.newest)
            newest_tick = (newest.ms << layout.sequence_bits) | newest.sequence
            clock_tick = last.clock_ms << layout.sequence_bits
            if newest_tick > _reached(last, layout, clock_tick):
                column = f"{sample.table_name}.{sample.column_name}"
                yield Found(
                    what=f'{column} of shard {sample.shard} on node "{name}" has ID {sample.newest},'
                    " beyond the last ID of its generator, which may issue it again",
                    to_do="Activate it past that ID",
                    commands=in_shell(f"shardids shard activate {sample.shard} --above-tick {newest_tick}"),
                    nodes=(name,),
                    shards=(sample.shard,),
                    thing=column,
                )


def _reached(draws: Shard, layout: Layout, clock_tick: int) -> int:
    """Return a tick that the generator has passed: it issues no tick up to it again."""
    reached = _reached_tick(draws, layout)
    # The first draw after an activation goes past the clock.
    return reached if draws.has_drawn else max(reached, clock_tick)


@check("on-copy-warns", Severity.WARNING, remedy="Set `on_copy` to `refuse`, once the copy is activated.")
def on_copy_warns(facts: ClusterFacts) -> Iterator[Found]:
    """A node lets copies of its shards issue IDs, with a warning: those of the original will come twice."""
    for name, node in facts.nodes.items():
        if node.engine and node.engine.on_copy != "refuse":
            yield Found(
                what=f'shardids.node.on_copy of node "{name}" is {node.engine.on_copy}: a copy of this'
                " database issues the same IDs as the original",
                to_do="Let copies refuse",
                commands=on_node(name, "update shardids.node set on_copy = 'refuse';"),
                nodes=(name,),
            )


@check(
    "clocks-apart",
    Severity.WARNING,
    remedy="Synchronise them (NTP, chrony): IDs stay unique, but their times are off.",
)
def clocks_apart(facts: ClusterFacts) -> Iterator[Found]:
    """The clocks of two nodes are more than a second apart, measured over round trips."""
    clocks = [(name, node.clock) for name, node in facts.nodes.items() if node.clock]
    for (one, first), (other, second) in combinations(clocks, 2):
        apart = Difference.between(second, first)
        if apart.is_too_large:
            ahead, behind = (other, one) if apart.ahead_s > 0 else (one, other)
            yield Found(
                what=f'the clock of node "{ahead}" is {apart} ahead of node "{behind}"\'s',
                to_do="Check the time synchronisation of both, for example with chronyc tracking",
                nodes=(ahead, behind),
            )


@check(
    "clock-unconfirmed",
    Severity.ERROR,
    remedy="If the clock is right: `shardids node confirm-clock NAME`. Else set it right.",
)
def clock_unconfirmed(facts: ClusterFacts) -> Iterator[Found]:
    """A node's clock is more than `max_step` past the last IDs of its shards: `next_id()` fails."""
    for name, node in facts.nodes.items():
        known = [
            (last.clock_ms, reached)
            for shard, (_, last) in node.draws.items()
            if node.shards[shard].state == "active"
            and (reached := _reached_tick(last, facts.description.layout)) > 0
        ]
        if node.engine is None or not known:
            continue
        bits = facts.description.layout.sequence_bits
        behind_ms = min(clock_ms - (reached >> bits) for clock_ms, reached in known)
        if (confirmed_ms := node.engine.clock_confirmed_ms) is not None:
            behind_ms = min(behind_ms, known[0][0] - confirmed_ms)
        if behind_ms > node.engine.max_step_ms:
            yield Found(
                what=f'the clock of node "{name}" is {behind_ms / _DAY_MS:.1f} days past the last IDs of its'
                f" shards, more than max_step, {node.engine.max_step_ms / _DAY_MS:.0f} days; next_id() fails"
                " (SI012) until the clock is confirmed",
                to_do="Check the clock. If it is right, confirm it for all shards of the node",
                commands=in_shell(f"shardids node confirm-clock {name}"),
                nodes=(name,),
            )


@check(
    "skipped-ticks",
    Severity.ERROR,
    remedy="Bring the range to all nodes: `shardids shard reset-clock N`.",
)
def skipped_ticks(facts: ClusterFacts) -> Iterator[Found]:
    """A node lacks ticks, still to come, that a shard issued by a wrong clock, or the catalog does."""
    wanted = set(facts.skipped)
    for name, node in facts.nodes.items():
        if node.engine is None:
            continue
        now_ms = int(facts.at.timestamp() * 1000) - facts.description.layout.epoch_ms
        for where, there, lacking in (
            (f'node "{name}"', set(node.skipped), wanted),
            ("the catalog", wanted, set(node.skipped)),
        ):
            shards = tuple(
                sorted(
                    {
                        one.shard
                        for one in lacking - there
                        if one.last_tick >> facts.description.layout.sequence_bits >= now_ms
                    }
                )
            )
            if shards:
                yield Found(
                    what=f"{named_shards(shards)}: {where} does not skip the ticks of a wrong clock, so IDs"
                    " may repeat"
                    if lacking is wanted
                    else f'{named_shards(shards)}: node "{name}" skips the ticks of a wrong clock; the'
                    " catalog does not record them, so other nodes could issue them",
                    to_do="Record them in the catalog and on all nodes",
                    commands=in_shell(f"shardids shard reset-clock {shown_shards(shards)} --yes"),
                    nodes=(name,),
                    shards=shards,
                )


@check(
    "slow-draws",
    Severity.WARNING,
    remedy="Make draws quick again: `shardids shard reset-clock N`.",
)
def slow_draws(facts: ClusterFacts) -> Iterator[Found]:
    """A shard has skipped the ticks of a wrong clock, and each draw still checks them."""
    for name, node in facts.nodes.items():
        shards = tuple(
            sorted(s.shard for s in node.shards.values() if s.is_slow and facts.owns(name, s.shard))
        )
        if shards:
            yield Found(
                what=f'{named_shards(shards)} of node "{name}" skipped the ticks of a wrong clock;'
                " next_id() still checks them",
                to_do="Remove the check, which slows next_id() down",
                commands=in_shell(f"shardids shard reset-clock {shown_shards(shards)} --yes"),
                nodes=(name,),
                shards=shards,
            )


@check(
    "ticks-ahead",
    Severity.WARNING,
    remedy="Correct the clock, slow the writer down, or examine the shard that issued an ID from the future,"
    " which a session with `after=` went past. Above `max_ahead`, `next_id()` fails: bring the shard back"
    " with `shardids shard reset-clock N`.",
)
def ticks_ahead(facts: ClusterFacts) -> Iterator[Found]:
    """A shard's IDs are more than a minute and six safety margins ahead of its server's clock."""
    for name, node in facts.nodes.items():
        if node.engine is None:
            continue
        ahead = {
            shard: ahead_ms
            for shard, (_, last) in node.draws.items()
            if node.shards[shard].state == "active"
            and (ahead_ms := last.lead_ms(facts.description.layout) or 0)
            > _MOST_AHEAD_MS + 6 * node.engine.safety_margin_ms
        }
        refused = {shard: ms for shard, ms in ahead.items() if ms > node.engine.max_ahead_ms}
        # Begins max_ahead past the present once it was reset.
        reset = {one.shard for one in node.skipped}
        ahead = {s: ms for s, ms in ahead.items() if s not in refused and s not in reset}
        if refused:
            yield Found(
                what=f'{named_shards(refused)} of node "{name}": IDs are up to {_days(max(refused.values()))}'
                f" ahead of the clock; above max_ahead, {node.engine.max_ahead_ms / 1000:.0f} s, next_id()"
                " fails (SI005)",
                to_do="If the clock was wrong and is right now, bring them back to the present; --dry-run"
                " shows the range",
                commands=in_shell(f"shardids shard reset-clock {shown_shards(refused)}"),
                nodes=(name,),
                shards=tuple(sorted(refused)),
                severity=Severity.ERROR,
            )
        if ahead:
            most, limit_ms = max(ahead.values()), node.engine.max_ahead_ms
            yield Found(
                what=f'{named_shards(ahead)} of node "{name}": IDs are up to {most / 1000:.1f} s ahead of the'
                f" clock; at {limit_ms / 1000:.0f} s next_id() fails",
                to_do="Check whether the server's clock was set back. If it is right, either more IDs are"
                f" drawn than the layout has ({facts.description.layout.sequence_limit * 1000} per second and"
                " shard), or sessions with after= (advance_past) went past an ID from the future: examine the"
                " shard and the node that issued it",
                nodes=(name,),
                shards=tuple(sorted(ahead)),
                severity=Severity.ERROR if most > limit_ms / 2 else None,
            )


def _days(ms: float) -> str:
    return f"{ms / _DAY_MS:.1f} days" if ms > _DAY_MS else f"{ms / 1000:.1f} s"


def _reached_tick(draws: Shard, layout: Layout) -> int:
    return max(draws.stored_tick(layout), draws.high_water_tick)


@check("tick-rate", Severity.WARNING, remedy="Spread the writes over more shards.")
def tick_rate(facts: ClusterFacts) -> Iterator[Found]:
    """Draws one by one take more than four fifths of the IDs that the layout has for a shard each second."""
    layout = facts.description.layout
    limit = layout.sequence_limit * 1000
    for name, node in facts.nodes.items():
        for shard, (first, last) in sorted(node.draws.items()):
            seconds = (last.clock_ms - first.clock_ms) / 1000
            # The offset tells no rate: blocks raise it, and so do after= and a new incarnation.
            drawn = last.drawn - first.drawn
            if seconds > 0 and drawn / seconds > _NEAR_THE_LIMIT * limit:
                yield Found(
                    what=f'shard {shard} of node "{name}" drew {drawn / seconds:,.0f} IDs per second in the'
                    f" last {seconds:.1f} s; the layout has {limit:,}",
                    to_do="Spread its writes over more shards",
                    nodes=(name,),
                    shards=(shard,),
                )


@check("years-left", Severity.WARNING, remedy="Plan a new layout; an error within one year.")
def years_left(facts: ClusterFacts) -> Iterator[Found]:
    """The layout's time ends, or its IDs turn negative, within ten years."""
    layout = facts.description.layout
    for what, at in (
        ("no more IDs can be made", layout.last_time),
        ("IDs are negative and sort before the older ones", layout.negative_from),
    ):
        if at is None:
            continue
        years = (at - facts.at).days / _DAYS_A_YEAR
        if years < _FEW_YEARS and (years > 0 or at == layout.last_time):
            yield Found(
                what=f"from {at:%Y-%m-%d} on, in {years:.1f} years, {what} in layout {layout}",
                to_do="Plan the move to a cluster with another layout",
                severity=Severity.ERROR if years < 1 else None,
            )
