"""A report on one or several models: collect.py (what is asked for, and measuring it) · tables.py · content.py (the
sentences around them) · page.py with page.html.j2 and page.md.j2 (figures and files).
"""
