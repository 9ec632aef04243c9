"""A report on one or several models: asked.py (what is wanted) · collect.py, training.py (numbers, as plain data) ·
matching.py, numbers.py, tables.py, charts.py (what is shown of them) · content.py, provenance.py (the sentences) ·
document.py, markdown.py, html.py, folder.py (the files).
"""
