"""The name under which tests of conformance report what they are about (tests/conftest.py writes the ledger)."""

PROPERTY = "conforms"
