"""Potluck's model."""
