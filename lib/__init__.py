"""Shared code of the EAGLE-3 hidden-state workbook.

One direction of dependencies: files -> captures, checkpoints -> draft(contract) -> predictions ->
metrics -> plots. Importing any module reads no file, picks no device and starts nothing.
"""
