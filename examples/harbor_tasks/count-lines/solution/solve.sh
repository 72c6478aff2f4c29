#!/bin/sh
wc -l < words.txt > count.txt
