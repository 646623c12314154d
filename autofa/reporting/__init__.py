"""Leaderboards: stored rows as ranked entries, and entries as tables and machine formats."""
