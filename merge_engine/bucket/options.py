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

MEBIBYTE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class BucketOptions:
    """Limits and sizes of a bucket; the defaults keep one below a few hundred MiB of memory.

    `behind_max_*`: the view keeps the newest rows in memory and writes them to RocksDB together
    when they reach this size, or when so many offsets of the log would have to be replayed.
    `undo_max_*`: about how much an undo takes back in one step; others write in between.
    """

    put_max_rows: int = 1_000_000
    put_max_bytes: int = 64 * MEBIBYTE
    undo_max_bytes: int = 8 * MEBIBYTE
    undo_max_rows: int = 50_000
    behind_max_bytes: int = 4 * MEBIBYTE
    behind_max_offsets: int = 250_000
    write_buffer_bytes: int = 64 * MEBIBYTE
    block_cache_bytes: int = 128 * MEBIBYTE
    stall_deadline_s: float = 30.0

    def to_cache(self) -> Cache:
        """Return a block cache; buckets of one process share one."""
        return Cache(self.block_cache_bytes)

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
