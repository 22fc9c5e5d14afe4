"""Data shards as batches: read ahead by the Rust core, in an order that resumes exactly."""
