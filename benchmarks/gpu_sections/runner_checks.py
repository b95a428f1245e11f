"""x"""
from __future__ import annotations
from benchmarks.gpu_sections.section import Section
def run(section: Section) -> None:
    pass
