# SQLite's own tests, all of whose databases are read through the extension:
#
#   testfixture default_vfs.tcl EXTENSION TEST.test
#
# `testfixture` and the tests are built from SQLite's source (./configure --enable-load-extension && make testfixture).
set argv [lassign $argv extension test]
set argv0 $test
sqlite3 loader :memory:
loader enable_load_extension 1
loader eval {SELECT load_extension($extension, 'sqlite3_quinionvfsdefault_init')}
loader close
source $test
