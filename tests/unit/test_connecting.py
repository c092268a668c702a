"""Where a cluster is looked for: arguments, then the environment, then the file."""

from pathlib import Path

import pytest

from foundation.errors import InvalidInput
from tallybook.connecting import CONFIG_VARIABLE, Reach, find_reach

FILE = """
zookeeper = "of-file:2181/chroot"
token_file = "token"
tls_root = "/etc/ca.pem"
credentials_file = "~/zookeeper"
"""


def found(
    tmp_path: Path, text: str | None, address: str | None = None, **environment: str
) -> tuple[Reach, dict[str, str]]:
    path = tmp_path / "config.toml"
    if text is not None:
        path.write_text(text)
    environment.setdefault(CONFIG_VARIABLE, str(path))
    return find_reach(address, how="an argument", environment=environment), environment


def test_the_file_says_what_nobody_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "zookeeper").write_text("user:pass:word\n")
    reach, environment = found(tmp_path, FILE)
    assert reach.address == "of-file:2181/chroot"
    assert reach.credentials(environment).token == "secret"
    assert reach.credentials(environment).tls_root == Path("/etc/ca.pem")
    assert reach.zookeeper_credentials(environment) == ("user", "pass:word")


def test_the_environment_comes_before_the_file_and_arguments_before_both(tmp_path: Path) -> None:
    theirs = {
        "TALLYBOOK_ZOOKEEPER": "of-file:2181/chroot",
        "TALLYBOOK_TOKEN": "theirs",
        "TALLYBOOK_ZOOKEEPER_CREDENTIALS": "me:it",
    }
    reach, environment = found(tmp_path, FILE, **theirs)
    assert reach.credentials(environment).token == "theirs"
    assert reach.zookeeper_credentials(environment) == ("me", "it")
    reach, _ = found(tmp_path, FILE, "given:1", **theirs)
    assert reach.address == "given:1"
    given = tmp_path / "given"
    given.write_text("given")
    reach = find_reach("given:1", how="", token_file=given, environment=environment)
    assert reach.credentials(environment).token == "given"


def test_the_secrets_of_the_file_are_not_for_another_cluster(tmp_path: Path) -> None:
    reach, environment = found(tmp_path, FILE, "elsewhere:2181")
    assert reach.credentials(environment).token is None
    assert reach.zookeeper_credentials(environment) is None
    assert reach.tls_root is None


def test_a_file_that_is_not_there_says_nothing_unless_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_reach("a:1", how="", environment={}).address == "a:1"
    with pytest.raises(InvalidInput, match=r"as an argument, in the variable TALLYBOOK_ZOOKEEPER"):
        find_reach(None, how="an argument", environment={})
    with pytest.raises(InvalidInput, match="there is no such file"):
        found(tmp_path, None)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("zookeper = 'a:1'", r"there is no setting 'zookeper'; did you mean 'zookeeper'\?"),
        ("zookeeper = 2181", r"zookeeper is a text, not 2181"),
        ("zookeeper", r"is not TOML"),
        ("token_file = 'missing'\nzookeeper = 'a:1'", r"the token file .*/missing cannot be read"),
    ],
)
def test_what_is_wrong_with_the_file_is_told(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        found(tmp_path, text)[0].credentials({})
