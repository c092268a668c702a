"""Makes the JVMs of tests start in half the time: with Spark's classes read and checked before.

`python -m tests.support.java_classes` starts a Spark once, has it do a little of everything, and
has the JVM write down the classes that it has loaded, next to the interpreter. `make test` does so
before the first run. Where there is no such file, everything works, and takes longer.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ARCHIVE = Path(sys.prefix) / "spark-classes.jsa"
# JVMs of tests live for a minute: what they would gain by compiling well is less than it costs.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# Options are told apart by the spaces between them.
_IS_USED = ARCHIVE.exists() and " " not in str(ARCHIVE)
FASTER = f"{SHORT_LIVED} -XX:SharedArchiveFile={ARCHIVE}" if _IS_USED else SHORT_LIVED

_DEADLINE_S = 600.0
_FOR_THE_CHILD = "--load"


def be_fast() -> None:
    """Have all Sparks that this process starts, and those of its children, start like this."""
    os.environ.setdefault("SPARK_SUBMIT_OPTS", FASTER)
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", SHORT_LIVED)


def main() -> int:
    """Write the file."""
    made = ARCHIVE.with_suffix(f".{os.getpid()}")
    options = f"{SHORT_LIVED} -Xlog:cds=off -Xlog:cds+dynamic=off -XX:ArchiveClassesAtExit={made}"
    child = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, _FOR_THE_CHILD],
        env={**os.environ, "SPARK_SUBMIT_OPTS": options},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        # The JVM ends after its Python, writes while it does, and has its standard error until
        # then: so this waits for both.
        _, said = child.communicate(timeout=_DEADLINE_S)
        if child.returncode:
            raise subprocess.SubprocessError(said.strip().rpartition("\n")[2])
        made.rename(ARCHIVE)
    except (OSError, subprocess.SubprocessError) as exc:
        print(f"Spark's classes were not written down, so tests take longer: {exc}")
    finally:
        with suppress(ProcessLookupError):  # All that is left of them, the JVM, too.
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        made.unlink(missing_ok=True)
    return 0


def _load() -> None:
    """Have a Spark do a little of everything that tests do."""
    from tests.support.spark_session import quiet_spark  # noqa: PLC0415

    with quiet_spark("local[2]") as spark:
        numbers = spark.range(100).selectExpr("id % 7 AS k", "id", "cast(id AS string) AS text")
        numbers.createOrReplaceTempView("numbers")
        spark.sql("SELECT k, sum(id), max(text) FROM numbers GROUP BY k ORDER BY k").toPandas()
        numbers.join(numbers.groupBy("k").count(), "k").toArrow()
        numbers.repartition(2, "k").mapInArrow(lambda batches: batches, numbers.schema).count()
        directory = Path(spark.conf.get("spark.sql.warehouse.dir")).parent
        numbers.write.parquet(str(directory / "parquet"))
        numbers.write.json(str(directory / "json"))
        for kind in ("parquet", "json"):
            stream = spark.readStream.schema(numbers.schema).format(kind)
            (
                stream.load(str(directory / kind))
                .writeStream.foreachBatch(lambda frame, _: frame.toArrow() and None)
                .trigger(availableNow=True)
                .option("checkpointLocation", str(directory / f"{kind}-checkpoint"))
                .start()
                .awaitTermination()
            )


if __name__ == "__main__":
    if sys.argv[1:] == [_FOR_THE_CHILD]:
        _load()
    else:
        sys.exit(main())
