#!/bin/sh
tr a-z A-Z < words.txt > capitals.txt
