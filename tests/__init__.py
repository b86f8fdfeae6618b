"""Tests: a module per source module, plus wire/ (real sockets), live/ (real llama-server), fakes/ and data/."""
