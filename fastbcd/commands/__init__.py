"""The commands of `fastbcd`, one file each: main(arguments) -> exit status."""
