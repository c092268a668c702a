"""How long a batch would wait for Spark when a host is gone."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

import tallybook as tb
from sink.lost_hosts import notices_after_s, say_if_slow


class Conf:
    """Settings as Spark reads them: times have units here."""

    def __init__(self, **settings: str) -> None:
        self._settings = settings

    def getTimeAsSeconds(self, name: str, default: str) -> int:  # noqa: N802
        return int(self._settings.get(name, default).removesuffix("s"))

    def getTimeAsMs(self, name: str, default: str) -> int:  # noqa: N802
        return 1000 * self.getTimeAsSeconds(name, default)

    def getInt(self, name: str, default: int) -> int:  # noqa: N802
        return int(self._settings.get(name, default))


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, 120 + 3 * (5 + 120)),
        ({"spark.shuffle.io.maxRetries": "0"}, 120 + 60),
        ({"spark.network.timeout": "20s"}, 20 + 3 * (5 + 20)),
        (
            {
                "spark.network.timeout": "20s",
                "spark.shuffle.io.connectionTimeout": "5s",
                "spark.shuffle.io.retryWait": "1s",
            },
            20 + 60,
        ),
        (tb.spark.LOST_HOSTS, 8 + 1 * (1 + 3)),
    ],
)
def test_the_longest_of_sparks_waits_counts(settings: dict[str, str], seconds: float) -> None:
    assert notices_after_s(Conf(**settings)) == seconds


@pytest.mark.parametrize(
    ("master", "settings", "warns"),
    [
        ("spark://there:7077", {}, True),
        ("spark://there:7077", tb.spark.LOST_HOSTS, False),
        ("local[2]", {}, False),
        ("local-cluster[2,1,1024]", {}, False),
    ],
)
def test_a_sink_says_what_nobody_has_told_spark(
    master: str, settings: dict[str, str], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    java = SimpleNamespace(sc=lambda: SimpleNamespace(conf=lambda: Conf(**settings)))
    context: Any = SimpleNamespace(master=master, _jsc=java)
    with caplog.at_level(logging.WARNING):
        say_if_slow(context)
    assert ("may wait for Spark for 495 s" in caplog.text) is warns
