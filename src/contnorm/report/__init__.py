"""Tables, figures and pages, made from files alone: nothing here needs torch."""
