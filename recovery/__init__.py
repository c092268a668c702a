"""The exactly-once writer: lock, fence, undo or redo, batches, commit."""
