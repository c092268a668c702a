"""A Spark session for tests: small, on loopback, and silent."""

import atexit
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.java_classes import FASTER

_ONLY_ERRORS = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""
_OF_THE_JVM = ("spark.driver.memory", "spark.driver.extraJavaOptions")


def needs_java() -> None:
    """Skip the test where there is no Java to run Spark with."""
    if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
        pytest.skip("Spark needs Java, and there is none on the PATH or in JAVA_HOME")


@contextmanager
def quiet_spark(master: str = "local[1]", **conf: Any) -> Iterator[Any]:
    """Start a Spark session, stop it at the end.

    `conf` may have underscores for dots: `quiet_spark(spark_sql_shuffle_partitions=4)`. There is
    one session per process at a time: a fixture that uses this has the scope of its module.
    """
    needs_java()
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="tallybook-spark-") as directory:
        logging = Path(directory, "log4j2.properties")
        logging.write_text(_ONLY_ERRORS)
        settings = {
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={logging.as_uri()}",
            "spark.driver.memory": "1g",
            "spark.executor.defaultJavaOptions": FASTER,
            "spark.local.dir": directory,
            "spark.sql.session.timeZone": "UTC",
            # Without it, the stop of a query that is stuck waits for ever.
            "spark.sql.streaming.stopTimeout": "120s",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(Path(directory, "warehouse")),
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        }
        settings |= {key.replace("_", "."): str(value) for key, value in conf.items()}
        # The workers must run the interpreter of the tests, and Spark must not look up host names.
        address = settings["spark.driver.bindAddress"]
        python = _python() if master.startswith("local") else sys.executable
        environment = {"SPARK_LOCAL_IP": address, "PYSPARK_PYTHON": python}
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            # What a JVM is started with is a setting of all its sessions, of other modules, too.
            of_the_jvm = [(name, settings[name]) for name in _OF_THE_JVM]
            SparkContext._ensure_initialized(conf=SparkConf(loadDefaults=False).setAll(of_the_jvm))
            builder = SparkSession.builder.master(master).appName("tallybook-tests")
            session = builder.config(map=settings).getOrCreate()
            session.sparkContext.setLogLevel("ERROR")
            try:
                yield session
            finally:
                session.stop()
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@cache
def _python() -> str:
    """Return a Python for workers of this machine that are there in half the time.

    Spark lets its workers import PySpark from an archive of sources, which each of them would
    compile: they take what is installed, and compiled, instead. It is there for as long as this
    process: its JVM, which outlives sessions, goes on with the one that it was started with.
    """
    directory = tempfile.mkdtemp(prefix="tallybook-python-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = shlex.quote(os.environ.get("PYTHONPATH", ""))
    script = Path(directory, "python")
    script.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {shlex.quote(sys.executable)} "$@"\n')
    script.chmod(0o755)
    return str(script)
