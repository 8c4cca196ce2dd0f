# SQLite's own tests, all of whose databases are read through the extension: `cargo xtask suites sqlite-vfs`.
#
#   testfixture default_vfs.tcl EXTENSION TEST.test
#
# At its end it says how many pages the cache had: with pages of less than 4 KiB, as SQLite's tests have them unless
# they are built otherwise, that is none.
set argv [lassign $argv extension test]
set argv0 $test

# Tests begin SQLite anew, which makes its own VFS the default again.
proc make_default {} {
  sqlite3 loader :memory:
  loader enable_load_extension 1
  loader eval {SELECT load_extension($::extension, 'sqlite3_quinionvfsdefault_init')}
  loader close
}
make_default
rename sqlite3_initialize initialize_alone
proc sqlite3_initialize {} {
  set code [initialize_alone]
  make_default
  return $code
}

rename exit end_of_program
proc exit {args} {
  catch {
    sqlite3 stats quinion-stats.db
    puts "quinion_stats [stats eval {PRAGMA quinion_stats}]"
    stats close
  }
  end_of_program {*}$args
}
source $test
