module quinion.example/hello

go 1.21
