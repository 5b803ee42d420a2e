"""Potluck's tools."""
