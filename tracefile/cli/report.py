"""What ``inspect`` prints."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tracefile.cli.charts import HeatMap, expert_bars, histogram
from tracefile.cli.console import count, id_ranges, indented, moment, period, printable, size

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from tracefile.load import ExpertLoad
    from tracefile.summary import SpanFacts, TraceFacts, WriterFacts
    from tracefile.survey import Revision, Survey

#: Longer lists of writers, geometries and unfinished segments are cut on the terminal; --json has them whole.
_MOST_WRITERS = 10
_MOST_GEOMETRIES = 3
#: Fewer samples than this have no distribution to draw.
_LEAST_SAMPLES = 8


class _Sheet:
    """Lines of a name and what it is."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.table = Table.grid(padding=(0, 2))
        self.table.add_column(style="bold", no_wrap=True, min_width=10)
        self.table.add_column(overflow="fold")
        self.columns = console.width - 12

    def add(self, name: str, value: RenderableType) -> None:
        self.table.add_row(name, Text(value) if isinstance(value, str) else value)

    def print(self) -> None:
        self.console.print(self.table)


def _title(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, "bold underline"))


def _model(sheet: _Sheet, facts: TraceFacts) -> None:
    model = facts.model
    layer_ids = model["layer_ids"]
    layers = "" if layer_ids == list(range(len(layer_ids))) else f" (ids {id_ranges(layer_ids)})"
    sheet.add(
        "model",
        f"{count(model['num_layers'], 'layer')}{layers} x top-{model['top_k']} of {model['num_experts']} experts,"
        f" stored as {model['dtype']}",
    )


def overview(console: Console, facts: TraceFacts) -> None:
    """All facts but the load."""
    console.print(Text(printable(facts.path), "bold"), soft_wrap=True)
    sheet = _Sheet(console)
    _model(sheet, facts)
    missing = sum(sample.missing_rows > 0 for sample in facts.samples)
    sheet.add(
        "samples",
        f"{count(len(facts.samples), 'sample')}, {count(facts.rows, 'row')}"
        + (f", of which {facts.missing_rows:,} in {count(missing, 'sample')} were never captured" if missing else ""),
    )
    _lengths(sheet, facts)
    if facts.superseded or facts.unreachable_rows:
        sheet.add(
            "superseded",
            f"{count(facts.superseded, 'older revision')} of samples;"
            f" {count(facts.unreachable_rows, 'stored row')} that no sample reaches any more",
        )
    shared = facts.rows_seen - facts.rows_stored
    if shared > 0:
        sheet.add(
            "shared",
            f"{count(facts.rows_seen, 'row')} appended, {facts.rows_stored:,} stored: sharing saves"
            f" {shared / facts.rows_seen:.0%}",
        )
    _findings(sheet, facts)
    if facts.bytes_stored:
        narrower = facts.bytes_narrow / facts.bytes_stored
        sheet.add(
            "size",
            f"{size(facts.bytes_int32)} as int32 -> {size(facts.bytes_stored)} stored: {facts.ratio:.2f} x smaller"
            f" ({narrower:.2f} x smaller than plain {facts.model['dtype']}); documents {size(facts.bytes_metadata)}",
        )
    codecs = ", ".join(f"{name}" if len(facts.codecs) == 1 else f"{name} {n:,}" for name, n in facts.codecs.items())
    sheet.add("segments", f"{facts.segments:,}" + (f", codec {codecs}" if codecs else ""))
    for number, each in enumerate(facts.geometries[:_MOST_GEOMETRIES]):
        sheet.add(
            "" if number else "chunks",
            f"{each.layers_per_chunk} layers x {each.rows_per_chunk:,} rows x {each.top_k} ids,"
            f" {size(each.chunk_bytes)} decoded"
            + (f", in {count(each.segments, 'segment')}" if len(facts.geometries) > 1 else ""),
        )
    if len(facts.geometries) > _MOST_GEOMETRIES:
        others = facts.geometries[_MOST_GEOMETRIES:]
        few, many = min(each.rows_per_chunk for each in others), max(each.rows_per_chunk for each in others)
        segments = count(sum(each.segments for each in others), "segment")
        sheet.add("", Text(f"and {count(len(others), 'other')} of {few:,} to {many:,} rows, in {segments}", "dim"))
    if facts.unfinished:
        shown = ", ".join(map(printable, facts.unfinished[:3])) + (", ..." if len(facts.unfinished) > 3 else "")
        sheet.add("unfinished", f"{len(facts.unfinished)} in staging, being written or left by killed writers: {shown}")
    if facts.vanished:
        sheet.add("vanished", f"{count(len(facts.vanished), 'segment')} removed while this was read")
    sheet.print()
    if facts.writers:
        _title(console, "Writers")
        console.print(_writers(facts.writers[:_MOST_WRITERS]))
        if len(facts.writers) > _MOST_WRITERS:
            console.print(Text(f"and {count(len(facts.writers) - _MOST_WRITERS, 'other')}", "dim"))


def _findings(sheet: _Sheet, facts: TraceFacts) -> None:
    """Signs of a bad capture, a line for each kind."""
    kinds = dict.fromkeys(finding.kind for finding in facts.findings)
    for number, kind in enumerate(kinds):
        found = [finding for finding in facts.findings if finding.kind == kind]
        layers = sorted({layer for finding in found for layer in finding.layers})
        sheet.add(
            "" if number else "findings",
            Text(
                f"{printable(kind)} in {count(len(found), 'sample')} ({count(sum(f.count for f in found), 'row')})"
                + (f", layers {id_ranges(layers)}" if layers else ""),
                "yellow",
            ),
        )


def _lengths(sheet: _Sheet, facts: TraceFacts) -> None:
    lengths = facts.lengths
    if lengths is None:
        return
    if lengths.min == lengths.max:
        if len(facts.samples) > 1:
            sheet.add("lengths", f"all {lengths.min:,}")
        return
    sheet.add(
        "lengths",
        f"min {lengths.min:,}   median {lengths.median:,.0f}   p90 {lengths.p90:,.0f}   max {lengths.max:,}"
        f"   mean {lengths.mean:,.0f} rows",
    )
    columns = min(sheet.columns, 72)
    if len(facts.samples) < _LEAST_SAMPLES:
        return
    edges = [lengths.min, *lengths.edges[1:-1], lengths.max + 1]
    for line in histogram(edges, lengths.counts, columns, ascii_only=sheet.console.options.ascii_only):
        sheet.add("", line)


def _table(*columns: str) -> Table:
    """A table whose columns are right-aligned where the name starts with ``>``."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="dim", show_edge=False)
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table


def _writers(writers: list[WriterFacts]) -> Table:
    table = _table("host", ">pid", "version", ">segments", ">samples", ">rows", "committed (UTC)")
    for writer in writers:
        table.add_row(
            printable(writer.host),
            str(writer.pid or "?"),
            printable(writer.version),
            f"{writer.segments:,}",
            f"{writer.samples:,}",
            f"{writer.rows:,}",
            period(writer.first, writer.last),
        )
    return table


def sample_list(console: Console, facts: TraceFacts) -> None:
    """One line per sample."""
    _title(console, "Samples")
    if not facts.samples:
        console.print("none")
        return
    table = _table("id", ">rows", ">missing", "segments")
    for sample in facts.samples:
        table.add_row(
            printable(sample.id), f"{sample.rows:,}", f"{sample.missing_rows:,}", " ".join(sample.segments) or "-"
        )
    console.print(table)


def sample(console: Console, facts: TraceFacts, survey: Survey, chosen: Revision, spans: list[SpanFacts]) -> None:
    """One sample: where its rows are."""
    entry = chosen.entry
    console.print(Text(printable(facts.path), "bold"), soft_wrap=True)
    sheet = _Sheet(console)
    _model(sheet, facts)
    sheet.add("sample", printable(entry.id))
    missing = sum(stop - start for start, stop in entry.missing)
    gaps = ", ".join(f"[{start}, {stop})" for start, stop in entry.missing[:20])
    gaps += ", ..." if len(entry.missing) > 20 else ""
    sheet.add("rows", f"{entry.rows:,}" + (f", of which {missing:,} were never captured: {gaps}" if missing else ""))
    writer = survey.segments[chosen.listed_in].writer
    sheet.add(
        "written",
        f"by {printable(str(writer.get('host', '?')))}, pid {writer.get('pid', '?')},"
        f" {moment(writer.get('created'))} UTC, in segment {chosen.listed_in}",
    )
    older = _older(survey, chosen)
    if older:
        sheet.add(
            "superseded", f"{count(len(older), 'older revision')}, of {', '.join(f'{n:,}' for _, n in older)} rows"
        )
    for number, finding in enumerate(finding for finding in facts.findings if finding.sample == entry.id):
        sheet.add("" if number else "findings", Text(printable(finding.message), "yellow"))
    sheet.print()
    _title(console, "Spans")
    if not spans:
        console.print("none: the sample has no rows")
        return
    table = _table(">rows of the sample", "segment", ">rows of the segment", ">chunks", ">stored")
    first = 0
    for span in spans:
        last = first + span.stop - span.start
        table.add_row(
            f"[{first:,}, {last:,})",
            span.segment,
            f"[{span.start:,}, {span.stop:,})",
            "?" if span.chunks is None else f"{span.chunks:,}",
            "?" if span.bytes is None else size(span.bytes),
        )
        first = last
    console.print(table)


def _older(survey: Survey, chosen: Revision) -> list[tuple[str, int]]:
    return [
        (revision.listed_in, revision.entry.rows)
        for revision in survey.revisions()
        if revision.superseded and revision.entry.id == chosen.entry.id
    ]


def sample_document(survey: Survey, chosen: Revision, spans: list[SpanFacts]) -> dict[str, Any]:
    """One sample as plain JSON values."""
    entry = chosen.entry
    return {
        "id": entry.id,
        "rows": entry.rows,
        "missing_rows": sum(stop - start for start, stop in entry.missing),
        "missing": [list(each) for each in entry.missing],
        "listed_in": chosen.listed_in,
        "spans": [
            {
                "segment": each.segment,
                "start": each.start,
                "stop": each.stop,
                "chunks": each.chunks,
                "bytes": each.bytes,
            }
            for each in spans
        ],
        "superseded": [{"listed_in": segment, "rows": rows} for segment, rows in _older(survey, chosen)],
    }


def _load_title(console: Console, load: ExpertLoad, what: str) -> bool:
    _title(console, f"Load of the experts{what}")
    if load.uncounted_rows:
        console.print(Text(f"without {count(load.uncounted_rows, 'row')} that could not be read", "red"))
    if load.wrong_ids:
        console.print(Text(f"without {count(load.wrong_ids, 'id')} that no expert has", "red"))
    if not load.rows:
        console.print("no captured rows")
    return load.rows > 0


def load_map(console: Console, load: ExpertLoad) -> None:
    """A heat map, one line per layer."""
    if not _load_title(console, load, f", {count(load.rows, 'captured row')}"):
        return
    ascii_only = console.options.ascii_only
    imbalances = [load.imbalance(position) or 0.0 for position in range(len(load.layer_ids))]
    label = max(5, *(len(str(layer)) for layer in load.layer_ids))
    heat = HeatMap.fit(load.counts.shape[1], console.width - label - 2 - 26)
    map_columns = max(heat.cells * heat.width, 7)
    head = f"{'layer':>{label}}  {heat.axis():<{map_columns}}  {'max/mean':>8} {'busiest':>8} {'idle':>5}"
    console.print(Text(head, "dim"), no_wrap=True, overflow="crop")
    worst = max(imbalances)
    for position, layer in enumerate(load.layer_ids):
        counts = load.counts[position]
        line = Text().append(f"{layer:>{label}}  ", "bold")
        line.append_text(heat.line(counts, ascii_only=ascii_only))
        line.append(" " * (label + 2 + map_columns - len(line)))
        line.append(f"  {imbalances[position]:>8.2f}", "bold red" if imbalances[position] == worst else "")
        line.append(f" {int(counts.argmax()):>8} {int((counts == 0).sum()) or '':>5}")
        console.print(line, no_wrap=True, overflow="crop")
    if heat.bin > 1:
        console.print(
            Text(f"a cell is {heat.bin} experts: as high as their mean, coloured by the busiest of them", "dim")
        )
    console.print(heat.legend(ascii_only=ascii_only))
    console.print(
        Text(
            f"max/mean over layers: median {np.median(imbalances):.2f},"
            f" worst {worst:.2f} in layer {load.layer_ids[imbalances.index(worst)]}",
        )
    )


def load_of_layer(console: Console, load: ExpertLoad) -> None:
    """Every expert of the one layer that was counted."""
    if not _load_title(console, load, f" of layer {load.layer_ids[0]}, {count(load.rows, 'captured row')}"):
        return
    counts = load.counts[0]
    mean, idle = counts.mean(), int((counts == 0).sum())
    console.print(
        f"max/mean {load.imbalance(0):.2f}   mean {mean:,.1f}   max {counts.max():,} (expert {counts.argmax()})"
        f"   min {counts.min():,} (expert {counts.argmin()})   idle {idle}"
    )
    for line in expert_bars(load, 0, console.width, ascii_only=console.options.ascii_only):
        console.print(line, no_wrap=True, overflow="crop")


def damage(console: Console, facts: TraceFacts) -> None:
    """The segments that are visibly damaged."""
    if not facts.damaged:
        return
    console.print()
    console.print(Text(f"Damaged: {count(len(facts.damaged), 'segment')}", "bold red"))
    for _, why in sorted(facts.damaged.items()):
        indented(console, Text(printable(why.replace(facts.path + os.sep, ""))))
