"""Coverage that cannot lie: data of every process, floors that fire, and reports that say what was not measured."""
