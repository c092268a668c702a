"""What rocksdict raises, as our errors: it has bare exceptions with RocksDB's status as text."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rocksdict import DbClosedError

from foundation.errors import Closed, CorruptView, InUse, StorageFull, StorageUnavailable


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Translate what rocksdict raises about the database at this path."""
    try:
        yield
    except (CorruptView, Closed):
        raise
    except DbClosedError as exc:
        raise Closed(f"{path} was closed meanwhile; open it again") from exc
    except Exception as exc:
        text = str(exc)
        if "While lock file" in text or "lock hold by current process" in text:
            raise InUse(
                f"{path} is open in another process or handle; close that one first"
            ) from exc
        if "Corruption" in text:
            raise CorruptView(rebuild(path, text)) from exc
        if "No space left" in text or "Disk quota" in text:
            raise StorageFull(f"{path}: no room; make room and try again") from exc
        if "IO error" in text or "Write stall" in text:
            raise StorageUnavailable(f"{path}: {text}") from exc
        raise


def rebuild(path: Path, reason: str) -> str:
    """Say what is wrong with a view, and the way out."""
    return f"view {path}: {reason}; remove the directory to rebuild it from the log"
