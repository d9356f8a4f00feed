//! A tree of named attributes, as under /sys: read, written, listed; served as files, commands and JSON.
