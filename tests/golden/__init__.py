"""Bytes of each format version that every later version must read."""
