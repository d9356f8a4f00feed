//! Carries out what the cores order, on any verbs.
