"""Potluck's broker."""
