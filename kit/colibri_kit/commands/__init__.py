"""One file a verb: parse -> plan -> act -> report. Each module defines ``command``."""
