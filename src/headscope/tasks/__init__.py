"""Prompts whose right answer is known, with a baseline."""

from headscope.tasks.base import Baseline, Case, Prompts, baseline, check_name, from_cases, from_jsonl, make, names

__all__ = ["Baseline", "Case", "Prompts", "baseline", "check_name", "from_cases", "from_jsonl", "make", "names"]
