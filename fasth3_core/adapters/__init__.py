"""Adapters: what their files hold, where each tensor goes, and weights that carry one."""
