"""``tracefile inspect``: what a trace holds."""

from __future__ import annotations

import difflib
import json
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracefile._version import __version__
from tracefile.cli import report
from tracefile.cli.console import DAMAGED, USAGE, Bar, count, fail, id_ranges, reported_errors, stdout
from tracefile.load import ExpertLoad, expert_load
from tracefile.store import absolute_path, read_trace_header
from tracefile.summary import sample_facts, span_facts, summarize
from tracefile.survey import Survey, take_survey

if TYPE_CHECKING:
    from tracefile.survey import Revision

EPILOG = "Exit codes: 0 sound as far as was looked, 1 a segment is damaged, 2 wrong usage or not a trace."


def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The trace's directory.")],
    samples: Annotated[
        bool, typer.Option("--samples", help="List the samples: rows, missing rows, segments that hold them.")
    ] = False,
    sample: Annotated[
        str | None,
        typer.Option("--sample", metavar="ID", help="Look at one sample: where its rows are, and its load alone."),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option("--layer", metavar="N", help="Show each expert of one layer, given by its global id."),
    ] = None,
    load: Annotated[
        bool, typer.Option("--load/--no-load", help="Read the routing and count the load of the experts, or do not.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")] = False,
) -> None:
    """Show what a trace holds.

    Model configuration, samples and their lengths, who wrote it, what it costs on disk, and how evenly the
    experts of each layer are loaded.

    In the load picture a line is a layer and a cell is an expert (or a few, where the terminal is too narrow):
    how often it was chosen, over the mean of its layer. max/mean is the load of the busiest expert over the
    mean: 1 is perfect balance. Idle experts were never chosen. Rows that were never captured (missing rows) do
    not count; of a sample that was written again, the newest revision counts.

    Counting the load reads the whole trace, a few MiB at a time; --no-load reads documents only.
    """
    with reported_errors():
        path = absolute_path(path)
        if layer is not None and not load:
            fail("--layer shows the load, which --no-load leaves out", USAGE)
        survey = take_survey(path, read_trace_header(path))
        position = _layer_position(survey, layer)
        chosen = _chosen(survey, sample)
        _run(survey, chosen, position, samples, load, as_json)


def _run(
    survey: Survey, chosen: Revision | None, position: int | None, list_samples: bool, load: bool, as_json: bool
) -> None:
    facts = summarize(survey)
    spans = None if chosen is None else span_facts(survey, chosen.entry, facts.damaged)
    console = stdout()
    if not as_json:
        if chosen is None or spans is None:
            report.overview(console, facts)
        else:
            report.sample(console, facts, survey, chosen, spans)
        if list_samples:
            report.sample_list(console, facts)
    counted = _counted(survey, chosen, position) if load else None
    if counted is not None:
        facts.damaged.update((segment, why) for segment, why in counted.damaged.items() if segment not in facts.damaged)
    if as_json:
        document: dict[str, Any] = {"tracefile": __version__, **facts.as_dict(list_samples=list_samples)}
        if chosen is not None and spans is not None:
            document["sample"] = report.sample_document(survey, chosen, spans)
        document["load"] = None if counted is None else counted.as_dict()
        typer.echo(json.dumps(document))
    elif counted is not None:
        if position is None:
            report.load_map(console, counted)
        else:
            report.load_of_layer(console, counted)
    if facts.damaged or (counted is not None and counted.wrong_ids):
        if not as_json:
            report.damage(console, facts)
        what = count(len(facts.damaged), "damaged segment") if facts.damaged else "ids that no expert has"
        fail(
            f"{what}; for all that is damaged, and whose rows, run: tracefile verify {shlex.quote(survey.path)}",
            DAMAGED,
        )


def _counted(survey: Survey, chosen: Revision | None, position: int | None) -> ExpertLoad:
    entries = [revision.entry for revision in survey.samples().values()] if chosen is None else [chosen.entry]
    captured = sum(facts.rows - facts.missing_rows for facts in (sample_facts(survey, entry) for entry in entries))
    with Bar("Reading", captured) as bar:
        return expert_load(survey, entries, layer=position, on_progress=bar.advance)


def _layer_position(survey: Survey, layer: int | None) -> int | None:
    ids = survey.header.config.layer_ids
    if layer is None:
        return None
    if layer not in ids:
        fail(f"no layer {layer} in {survey.path}; there are {id_ranges(ids)}", USAGE)
    return ids.index(layer)


def _chosen(survey: Survey, sample: str | None) -> Revision | None:
    if sample is None:
        return None
    samples = survey.samples()
    if sample in samples:
        return samples[sample]
    message = f"no sample {sample!r} among {len(samples):,} in {survey.path}; --samples lists them"
    if close := difflib.get_close_matches(sample, list(samples)[:10_000], 3, 0.5):
        message += f"; close are {', '.join(map(repr, close))}"
    if survey.damaged:
        message += f"; {count(len(survey.damaged), 'damaged segment')} may list it"
    return fail(message, DAMAGED if survey.damaged else USAGE)
