"""Several gateway processes behind one port: a supervisor that takes connections and hands them to its children."""
