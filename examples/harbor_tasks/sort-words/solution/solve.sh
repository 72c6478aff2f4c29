#!/bin/sh
sort -o words.txt words.txt
