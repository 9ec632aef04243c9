"""States inside a model, and reports that compare models.

metrics.py (of token states) · dynamics.py (one model along one trajectory) · figures.py · collect.py (measures the
parts of a report) · report.py (writes it: report.j2 has its words, report_tables.yaml its columns)
"""
