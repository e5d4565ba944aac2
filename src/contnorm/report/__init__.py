"""Reports: tables, figures and HTML pages made from record files. Needs no torch."""
