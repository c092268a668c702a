"""How a bucket uses memory and disk."""

from dataclasses import dataclass

from rocksdict import (
    BlockBasedOptions,
    Cache,
    DataBlockIndexType,
    DBCompressionType,
    Options,
    WriteOptions,
)

from merge_engine.working_set.memory import Memory

MEBIBYTE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class BucketOptions:
    """Limits and sizes of a bucket; the defaults keep one below a few hundred MiB of memory.

    `working_set_bytes`: how much memory the newest rows may take, of all buckets of a process
    together; what was not used for the longest time goes first.
    `behind_max_*`: rows that have changed are written to RocksDB together when they reach this
    size, or when so many offsets of the log would have to be replayed: up to `behind_few_rows`
    at once, and more than that beside other calls.
    `roll_up_*`: so many old segments of the log, or so many bytes of them, become one object; those
    that are large already stay as they are.
    `undo_max_*`: about how much an undo takes back in one step; others write in between.
    """

    put_max_rows: int = 1_000_000
    put_max_bytes: int = 64 * MEBIBYTE
    roll_up_segments: int = 1000
    roll_up_bytes: int = 8 * MEBIBYTE
    undo_max_bytes: int = 8 * MEBIBYTE
    undo_max_rows: int = 50_000
    working_set_bytes: int = 512 * MEBIBYTE
    behind_max_bytes: int = 32 * MEBIBYTE
    behind_max_offsets: int = 2_000_000
    behind_few_rows: int = 4096
    write_buffer_bytes: int = 64 * MEBIBYTE
    block_cache_bytes: int = 128 * MEBIBYTE
    stall_deadline_s: float = 30.0

    def to_cache(self) -> Cache:
        """Return a block cache; buckets of one process share one."""
        return Cache(self.block_cache_bytes)

    def to_memory(self) -> Memory:
        """Return the budget of the working sets; buckets of one process share one."""
        return Memory(self.working_set_bytes)

    def to_options(self, cache: Cache) -> Options:
        """Return RocksDB's options for a view: point reads, one column family, no WAL."""
        table = BlockBasedOptions()
        table.set_block_cache(cache)
        table.set_bloom_filter(10, False)
        table.set_data_block_index_type(DataBlockIndexType.binary_and_hash())
        table.set_format_version(5)
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_block_based_table_factory(table)
        options.set_compression_type(DBCompressionType.lz4())
        options.set_write_buffer_size(self.write_buffer_bytes)
        options.set_max_background_jobs(2)
        # As it writes, not all at its end: a put that syncs its segment would wait for that, too.
        options.set_bytes_per_sync(MEBIBYTE)
        options.set_level_compaction_dynamic_level_bytes(True)
        options.set_keep_log_file_num(2)
        options.set_max_log_file_size(MEBIBYTE)
        return options


def write_options() -> WriteOptions:
    """No WAL, since the log is the WAL; and fail rather than sleep with the interpreter lock."""
    options = WriteOptions()
    # The stub calls it a method; it is a property.
    options.disable_wal = True  # type: ignore[method-assign, assignment]
    options.no_slowdown = True
    return options
