"""Potluck's stage."""
