"""Drafts out of a row's own text."""
