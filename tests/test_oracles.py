"""A trace is plain Zarr v3: zarr-python, tensorstore and zarrs read the same values from the same files.

Each reader runs in an interpreter of its own that never imports tracefile: tensorstore and zarrs start threads
that do not survive a fork, and a reader must not need us.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support import random_routing, run_python

import tracefile
from tracefile.format import CONVENTION_UUID

Array = np.ndarray[Any, Any]

READERS = ["zarr", "tensorstore", "zarrs"]

#: num_layers, top_k, num_experts
MODELS = {"uint8-256": (5, 4, 256), "uint16-257": (5, 2, 257), "uint16-512-top22": (3, 22, 512), "one-layer": (1, 1, 2)}
CODECS = ["fast", "compact", "none"]
SEGMENTS = ["many", "one-row", "no-rows", "missing", "long"]

READ_ALL = """
import os, sys, warnings
import numpy as np
warnings.simplefilter("error")
reader, root, out = sys.argv[1:]

def with_zarr(trace):
    import zarr
    if reader == "zarrs":
        zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    group = zarr.open_group(trace, mode="r")
    for name in group["segments"].array_keys():
        array = group["segments"][name]
        if reader == "zarrs":
            pipeline = type(array._async_array.codec_pipeline).__name__
            assert pipeline == "ZarrsCodecPipeline", pipeline
        yield name, lambda rows, layers: array[layers, rows]

def with_tensorstore(trace):
    import tensorstore
    segments = os.path.join(trace, "segments")
    for name in sorted(os.listdir(segments)):
        if name != "zarr.json":
            array = tensorstore.open(
                {"driver": "zarr3", "kvstore": {"driver": "file", "path": os.path.join(segments, name) + "/"}},
                read=True,
            ).result()
            yield name, lambda rows, layers: array[layers, rows].read().result()

for case in sorted(os.listdir(root)):
    for name, read in (with_tensorstore if reader == "tensorstore" else with_zarr)(os.path.join(root, case)):
        whole = np.asarray(read(slice(None), slice(None)))
        np.save(os.path.join(out, f"{case}+{name}.npy"), whole)
        if whole.shape[0] > 1 and whole.shape[1] > 20:
            part = np.asarray(read(slice(11, whole.shape[1] - 3), slice(1, 3)))
            assert (part == whole[1:3, 11:-3]).all(), (case, name)
assert "tracefile" not in sys.modules
"""


@dataclass
class Case:
    path: str
    samples: dict[str, dict[str, Array]]  # kind of segment -> sample id -> what was appended
    segments: dict[str, str]  # kind of segment -> segment id


def _write(path: str, codec: str, num_layers: int, top_k: int, num_experts: int) -> Case:
    """One segment of each kind."""
    rng = np.random.default_rng(num_experts)

    def ids(rows: int) -> Array:
        return random_routing(rng, rows, num_layers, top_k, num_experts)

    holes = ids(100)
    holes[[0, 40, 41, 42, 99]] = -1
    samples = {
        # 64 rows a chunk: gaps after the first and the third sample, none after the second
        "many": {"a": ids(70), "b": ids(64), "empty": ids(0), "c": ids(3), "d": ids(130)},
        "one-row": {"one": ids(1)},
        "no-rows": {"none": ids(0), "none either": ids(0)},
        "missing": {"holes": holes, "dummy": np.full((5, num_layers, top_k), -1, np.int32)},
        "long": {"long": ids(3000)},
    }
    segments = {}
    with tracefile.TraceWriter(
        path,
        num_layers=num_layers,
        top_k=top_k,
        num_experts=num_experts,
        codec=codec,
        layers_per_chunk=2,
        rows_per_chunk=64,
    ) as writer:
        for kind in SEGMENTS:
            before = set(os.listdir(os.path.join(path, "segments")))
            writer.append_many(samples[kind].items())
            (segments[kind],) = set(os.listdir(os.path.join(path, "segments"))) - before
    return Case(path, samples, segments)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    root = tmp_path_factory.mktemp("oracles")
    return {
        f"{model}-{codec}": _write(str(root / f"{model}-{codec}"), codec, *MODELS[model])
        for model in MODELS
        for codec in CODECS
    }


@pytest.fixture(scope="module", params=READERS)
def read_by(
    request: pytest.FixtureRequest, cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Array]:
    """(case, segment id) -> the whole array, as one reader sees it."""
    out = tmp_path_factory.mktemp(request.param)
    root = os.path.dirname(next(iter(cases.values())).path)
    run_python(READ_ALL, request.param, root, str(out))
    found = {}
    for file in out.iterdir():
        case, segment = file.name.removesuffix(".npy").split("+")
        found[case, segment] = np.load(file)
    return found


@pytest.mark.parametrize("kind", SEGMENTS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("model", MODELS)
def test_other_readers_see_what_was_appended(
    read_by: dict[tuple[str, str], Array], cases: dict[str, Case], model: str, codec: str, kind: str
) -> None:
    case = cases[f"{model}-{codec}"]
    num_layers, top_k, num_experts = MODELS[model]
    header = tracefile.open(case.path).segments[case.segments[kind]]
    dtype = np.dtype("uint8" if num_experts <= 256 else "uint16")

    expected = np.full((num_layers, header.rows, top_k), np.iinfo(dtype).max, dtype)
    assert list(header.samples) == list(case.samples[kind])
    for sample, ids in case.samples[kind].items():
        at = 0
        for span in header.samples[sample].spans:
            assert span.segment == case.segments[kind]
            rows = span.stop - span.start
            # A row that was never captured (-1 here) is the fill value to readers that know no better.
            stored = np.where(ids < 0, np.iinfo(dtype).max, ids).astype(dtype)
            expected[:, span.start : span.stop] = stored[at : at + rows].swapaxes(0, 1)
            at += rows
        assert at == len(ids)

    seen = read_by[f"{model}-{codec}", case.segments[kind]]
    assert seen.dtype == dtype
    np.testing.assert_array_equal(seen, expected)


def test_largest_ids_are_among_what_is_compared(cases: dict[str, Case]) -> None:
    for model, (_, _, num_experts) in MODELS.items():
        assert max(ids.max(initial=0) for ids in cases[f"{model}-fast"].samples["many"].values()) == num_experts - 1


def test_segments_have_gaps_and_share_nothing(cases: dict[str, Case]) -> None:
    header = tracefile.open(cases["uint8-256-fast"].path).segments[cases["uint8-256-fast"].segments["many"]]
    spans = {sample: [(s.start, s.stop) for s in entry.spans] for sample, entry in header.samples.items()}
    assert spans == {"a": [(0, 70)], "b": [(128, 192)], "empty": [], "c": [(192, 195)], "d": [(256, 386)]}


@pytest.mark.parametrize("case", ["uint8-256-fast", "uint16-257-none"])
def test_group_as_zarr_lists_it(cases: dict[str, Case], case: str) -> None:
    trace = tracefile.open(cases[case].path)
    listing = run_python(
        """
import json, sys, warnings, zarr
warnings.simplefilter("error")
group = zarr.open_group(sys.argv[1], mode="r")
segments = group["segments"]
arrays = dict(segments.arrays())
print(json.dumps({
    "attributes": dict(group.attrs),
    "groups": sorted(group.group_keys()),
    "arrays": sorted(group.array_keys()),
    "segments": sorted(arrays),
    "subgroups": sorted(segments.group_keys()),
    "members": group.nmembers(max_depth=None),
    "named": [a.metadata.dimension_names for a in arrays.values()],
    "fill": [int(a.fill_value) for a in arrays.values()],
    "samples": {name: a.attrs["tracefile"]["samples"] for name, a in arrays.items()},
}))
""",
        trace.path,
    )
    seen = json.loads(listing.stdout)
    assert seen["groups"] == ["segments"]
    assert seen["arrays"] == seen["subgroups"] == []
    assert seen["segments"] == sorted(trace.segments)
    assert seen["members"] == 1 + len(trace.segments)
    assert all(names == ["layer", "token", "topk"] for names in seen["named"])
    assert set(seen["fill"]) == {trace.config.fill_value}

    ours = seen["attributes"]["tracefile"]
    assert ours["uuid"] == trace.uuid
    assert ours["format"] == 1
    assert {name: ours[name] for name in ("num_layers", "top_k", "num_experts")} == {
        "num_layers": trace.config.num_layers,
        "top_k": trace.config.top_k,
        "num_experts": trace.config.num_experts,
    }
    assert ours["layer_ids"] == list(range(trace.config.num_layers))
    (convention,) = seen["attributes"]["zarr_conventions"]
    assert convention["uuid"] == CONVENTION_UUID

    ids_by_segment = {segment: [item[0] for item in items] for segment, items in seen["samples"].items()}
    assert ids_by_segment == {segment: list(header.samples) for segment, header in trace.segments.items()}
