"""What a table's columns are: names, types, functions, ids, and how they are declared.

builder            the way to declare a table
connector_options  functions of columns from flat options, as Flink and Spark SQL have them
ddl                Spark's DDL, as far as a table needs it
invariants         what holds for every schema, whether it was built, evolved or read
schema             what a table is: its columns, which of them are the key, and how the others merge
state_columns      the states of columns, as columns that readers can ask for
types              the types that a table has, and how values of other types become them
"""
