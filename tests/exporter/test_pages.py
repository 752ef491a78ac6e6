"""Our own writer of pages against prometheus_client's, and what a scraper may ask of it."""

from __future__ import annotations

import gzip
import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gpuwarden.catalogue import CATALOGUE, MetricType
from gpuwarden.exporter.app import takes_gzip
from gpuwarden.exporter.pages import Bodies, Families, Format, clean, number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client import Metric as Family

Sample = tuple[str, float, tuple[str, ...]]

AWKWARD = 'a\\b"c\td\ne,f}g\ud800 \N{SNOWMAN}'
NUMBERS = (0.0, -0.0, 1, 0.1, 123456.0, 999999.5, 1e6, 1234567.25, 1e15, 1e16, 1e300, 1e-9, -2e9)


class _Theirs(Collector):
    """The same samples for prometheus_client."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = list(samples)

    def collect(self) -> Iterable[Family]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for name, value, labels in self._samples:
            metric = CATALOGUE[name]
            counter = metric.type is MetricType.COUNTER
            made = CounterMetricFamily if counter else GaugeMetricFamily
            if name not in families:
                short = name.removesuffix("_total") if counter else name
                families[name] = made(short, metric.help, labels=metric.labels)
            families[name].add_metric([clean(label) for label in labels], value)
        return [families[name] for name in CATALOGUE if name in families]

    def page(self, form: Format) -> bytes:
        """As prometheus_client writes it."""
        if form is Format.TEXT:
            return exposition.generate_latest(self)
        return openmetrics.generate_latest(self)


def _ours(samples: Iterable[Sample], previous: Families | None = None) -> Families:
    families = Families(previous)
    for name, value, labels in samples:
        families.add(name, value, *labels)
    return families


def _every_family(label: str) -> Sequence[Sample]:
    return [
        (name, NUMBERS[at % len(NUMBERS)], tuple(f"{label}{n}" for n in range(len(metric.labels))))
        for at, (name, metric) in enumerate(CATALOGUE.items())
        if metric.type is not MetricType.HISTOGRAM  # the engine's, written by prometheus_client
    ]


@pytest.mark.parametrize("form", Format)
@pytest.mark.parametrize("label", ["", "x", AWKWARD])
def test_every_family_is_written_as_prometheus_client_does(form: Format, label: str) -> None:
    """Whole pages are the same to the byte, whatever is in the labels."""
    samples = _every_family(label)
    assert Bodies(_ours(samples))[form] == _Theirs(samples).page(form)


@given(
    values=st.lists(
        st.tuples(
            st.floats(allow_nan=False, allow_infinity=False),
            st.text(st.characters(codec=None), max_size=20),
        ),
        max_size=5,
        unique_by=lambda item: clean(item[1]),
    )
)
def test_any_page(values: list[tuple[float, str]]) -> None:
    """Any values and labels give prometheus_client's page, which both parsers read back."""
    samples = [("gpuwarden_dropped_values_total", value, (label,)) for value, label in values]
    bodies = Bodies(_ours(samples))
    for form, parse in ((Format.TEXT, parse_text), (Format.OPENMETRICS, parse_openmetrics)):
        assert bodies[form] == _Theirs(samples).page(form)
        if form is Format.TEXT or all(value >= 0 for value, _ in values):
            read = [item for family in parse(bodies[form].decode()) for item in family.samples]
            expected = [({"reason": clean(label)}, value) for value, label in values]
            assert [(item.labels, item.value) for item in read] == expected


@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_any_number(value: float) -> None:
    """Numbers are written as prometheus_client writes them, and lose nothing."""
    assert number(value) == floatToGoString(value)
    assert float(number(value)) == value


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_out(value: float | None) -> None:
    """Not known is absent."""
    families = Families()
    families.add("gpuwarden_nvml_up", value)
    assert list(families.written()) == []


def test_nothing_of_an_earlier_page_stays() -> None:
    """What is kept between pages is how series are written, not that they are there."""
    first = _ours([("gpuwarden_collector_success", 1.0, (label,)) for label in "abc"])
    second = _ours([("gpuwarden_collector_success", 0.0, ("b",))], first)
    ((_, samples),) = second.written()
    assert samples == 'gpuwarden_collector_success{collector="b"} 0.0\n'
    third = _ours([("gpuwarden_collector_success", 1.0, ("a",))], second)
    assert 'collector="a"' in Bodies(third)[Format.TEXT].decode()


def test_a_compressed_page_is_the_page() -> None:
    """Compression changes how a page travels, and two scrapes get the same bytes."""
    bodies = Bodies(_ours(_every_family("x")))
    sent = bodies.get_encoded(Format.OPENMETRICS, compressed=True)
    assert gzip.decompress(sent) == bodies[Format.OPENMETRICS]
    assert bodies.get_encoded(Format.OPENMETRICS, compressed=True) is sent


@pytest.mark.parametrize(
    ("header", "taken"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("gzip;q=0", False),
        ("gzip; q=nonsense", False),
        ("identity", False),
        ("*", False),
        ("", False),
    ],
)
def test_gzip_only_where_it_is_taken(header: str, *, taken: bool) -> None:
    """A page is compressed for who names gzip and does not refuse it."""
    assert takes_gzip(header) is taken
