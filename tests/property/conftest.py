"""The models assert, too: let pytest say what was compared, as it does in tests."""

import pytest

pytest.register_assert_rewrite(
    "tests.property.changelog_replay",
    "tests.property.lock_model",
    "tests.property.lock_world",
    "tests.property.modelled_table",
    "tests.writer_model",
    "tests.writer_world",
)
